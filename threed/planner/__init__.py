"""What a run will need before it starts: the model built on the meta device, its memory, its time per step."""
