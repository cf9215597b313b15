"""Operations over a sequence that is split between devices, made of other operations."""
