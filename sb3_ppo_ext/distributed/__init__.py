"""Several processes that train one model: their ranks, what they exchange, and statistics over all of them."""
