"""Attention on one device, over keys that were gathered: layouts, masks, XLA's way and cuDNN's."""
