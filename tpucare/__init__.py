"""The caretaker of preemptible Google Cloud TPUs: the public names, nothing else."""

__version__ = "0.1.0"
