"""
What people complained about in other caretakers of preemptible TPUs, each as one named test.

The docstring is the complaint in our own words; the test plays it in the emulator's world and looks at what is there
in the end. Most run the real engine under virtual time.
"""
