"""Parts of `gpu_distill.py`: what is prepared on one machine, carried in pieces, and trained on another."""
