"""What every room uses: checks of arguments, guards against NaN, schedules, observations, saved models."""
