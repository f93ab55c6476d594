"""MLP policies on the CPU, computed by an extension module in C."""
