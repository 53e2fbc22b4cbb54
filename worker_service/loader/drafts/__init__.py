"""What drafts tokens for a loaded model, the target.

| file | holds |
| --- | --- |
| `draft_model.py` | a model of its own |
| `draft_head.py` | building a draft head, and filling it from its checkpoint |
| `eagle_head.py` | an EAGLE-3 head, which is checked against its target |
| `mtp_head.py` | the head in the checkpoint of the target itself |
"""
