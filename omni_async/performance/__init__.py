"""Models how long stages take, and what a job made of them can reach at best. Pure: no torch, no Ray, no clock."""
