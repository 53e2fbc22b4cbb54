"""How the tokens of a sequence affect each other in a layer. Each part implements
`decoder.specs.MixerSpec`.

    attention.py         attention over the paged cache
    latent_attention.py  attention over latents of keys and values (DeepSeek)
    convolution.py       causal convolutions, which keep their last inputs (LFM2)
    mamba.py             Mamba and Mamba-2, alone or beside attention
    shared_block.py      Mamba-2 behind attention and an MLP that layers share (Zamba2)
    recurrent_unit.py    gated linear recurrent units (RecurrentGemma)
    delta_net.py         gated delta nets, whose heads keep a matrix (Qwen3-Next, Kimi)
"""
