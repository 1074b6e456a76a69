"""Operations on torch's tensors: collectives, their derivatives, and what tensors look like to the core."""
