"""The long campaign of simulated histories, run by `make storm`; its figures go into docs/storms.md."""
