"""What follows attention in a layer. Each part implements `decoder.specs.FeedForwardSpec`.

mlp.py                multilayer perceptrons
experts.py            mixture of experts: router, experts, shared experts
dense_and_experts.py  an MLP and experts in one layer (Gemma 4)
"""
