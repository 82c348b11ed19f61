"""`python -m tpucare.cli`, where the entry point is not on PATH."""

from tpucare.cli import main

main()
