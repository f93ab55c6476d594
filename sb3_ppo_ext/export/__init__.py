"""
Export of an actor into one file that acts without this package: ONNX, or a program of ``torch.export``.

``model.export("policy.onnx")``, or ``python -m sb3_ppo_ext.export RUN_FOLDER``
"""

from sb3_ppo_ext.export.export import export_actor

__all__ = ["export_actor"]
