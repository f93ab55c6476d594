"""
Models on the Hugging Face Hub, with a model card, in the layout of files of RL Zoo.

Files from the Hub are not trusted: unless asked to, nothing of them is executed. It needs ``huggingface_hub``:
``pip install "sb3-ppo-ext[hub]"``.
"""

from sb3_ppo_ext.hub.folder import load_folder, save_folder
from sb3_ppo_ext.hub.transfer import load_from_hub, push_to_hub

__all__ = ["load_folder", "load_from_hub", "push_to_hub", "save_folder"]
