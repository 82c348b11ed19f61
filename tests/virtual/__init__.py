"""What stories add to the simulation: a real store on a disk, short ways to declare slots, a check at the end."""
