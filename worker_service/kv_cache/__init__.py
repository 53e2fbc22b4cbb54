"""The paged KV cache: `cache_engine.py` allocates it and moves blocks, `memory_budget.py` finds
how many blocks fit, `block_memory.py` lets other workers read them.
"""
