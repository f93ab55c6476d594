"""Utilities shared by all subpackages: argument checks, guards against NaN, schedules, observations, saved models."""
