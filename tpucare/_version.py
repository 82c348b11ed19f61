"""The version of tpucare; the package's metadata is made from it."""

__version__ = "1.0.0"
