"""The flags of `python -m worker_service`, and the launchers of ranks.

    flags.py          the flags, mostly fields of the configuration's dataclasses, and which rank a
                      process is
    launcher.py       restarts and ends ranks wherever they run; ranks as child processes
    ray_cluster.py    ranks as actors on the nodes of a Ray cluster

A launcher loads no model. It runs its own command line once per rank, forwards signals, and
restarts a rank that was killed; the other ranks keep their weights and are joined by it in the next
epoch. The ranks end with the launcher, even if it is killed.
"""
