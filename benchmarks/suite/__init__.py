"""The parts of `gpu_suite.py`: cases, the workers that run them, clocks, rows and the table."""
