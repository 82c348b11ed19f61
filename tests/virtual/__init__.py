"""What stories add to `tpucare.simulation`: a real store on a disk, short ways to declare slots, a check at the end."""
