"""What tpucare costs and how soon it acts, held against limits. `python -m tests.bench` (or `make bench`) measures."""
