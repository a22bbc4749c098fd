"""The errors subquad raises on purpose. Each message says what is wrong, the value, the rule and the fix."""


class SubquadError(Exception):
    """Root of every error subquad raises on purpose; the command line prints it without a traceback."""


class ConfigError(SubquadError, ValueError):
    """A recipe, mixer configuration or argument that breaks a rule; lists every problem found."""


class SourceError(SubquadError, ValueError):
    """A checkpoint that is missing, damaged or of a kind subquad cannot convert."""


class DataError(SubquadError, ValueError):
    """Training or evaluation text that is missing, empty or unreadable."""


class OutputError(SubquadError, RuntimeError):
    """An output folder that cannot be written, or that already holds something else."""


class FolderInUseError(OutputError):
    """A run's folder that another process is working in."""


class TaskError(SubquadError, RuntimeError):
    """Tasks of an evaluation that could not be measured; the others were kept."""


class TrainingError(SubquadError, RuntimeError):
    """A training run that diverged or produced NaN; the last good checkpoint was kept."""
