"""Speculative decoding.

| file | holds |
| --- | --- |
| `drafter.py` | the interface of drafters, and the search of a sequence's own tokens |
| `suffix_drafter.py` | drafts from recent outputs of the same tenant, too |
| `draft_model.py` | drafts of a second, smaller model |
| `head_drafter.py` | drafts of a head that reads the model's hidden states (EAGLE-3), on a CPU;
  on a GPU `device/drafts.py` makes them |
| `draft_states.py` | states after drafts, from which a sequence continues if some are rejected |
| `rank_drafts.py` | drafts of a step that several ranks launch ahead, which one of them chooses |
| `speculation.py` | how many drafts a row computes, and which of them are accepted |
"""
