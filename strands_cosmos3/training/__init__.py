"""Training: demonstrations, the VAE stage, joint flow matching on the engine's own modules,
export to the released layout.
"""
