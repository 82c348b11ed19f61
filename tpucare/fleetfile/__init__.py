"""Text of a fleet file -> `FleetSpec`, or errors with file, line and key. Pure; imports `model` alone."""
