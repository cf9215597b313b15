"""Operations over several nodes: kernels within each, XLA between them."""
