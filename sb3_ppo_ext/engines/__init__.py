"""How rollouts and updates are computed: one module or folder for each backend."""
