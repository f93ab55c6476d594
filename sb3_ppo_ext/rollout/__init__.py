"""How experience is collected, and the vectorised environments that it is collected from."""
