"""The real engine under a virtual Clock and Executor, in the emulator's world, with simulated workers."""
