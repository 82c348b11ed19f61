"""Services that fleets work for; each package has a `Companion` of the daemon (`service/daemon.py`)."""
