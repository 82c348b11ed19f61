"""Text of a fleet file -> `Fleet`, or errors with file, line and key. Pure; imports `model` alone."""
