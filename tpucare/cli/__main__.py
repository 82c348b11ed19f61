"""`python -m tpucare.cli`, for an entry point that is not on PATH."""

from tpucare.cli import main

main()
