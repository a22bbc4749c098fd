"""Studies of how near a converted model comes to its teacher, and of what keeps it away."""
