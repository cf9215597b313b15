"""Attention on one device, over gathered keys: layouts, masks, and the calls of XLA and cuDNN."""
