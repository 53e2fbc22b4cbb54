"""Starting the ranks of a group, and keeping them running.

    launcher.py       keeps every rank running, wherever it runs; ends them in order
    rank_process.py   one rank's command line and process
    local.py          ranks as children of the launcher, on its own machine
    ray_cluster.py    ranks on the nodes of a Ray cluster
    ray_rank.py       what Ray starts for a rank: the parent of its process

A launcher computes nothing and loads nothing. It runs its own command line once per rank, passes
signals on, and starts a rank again that was killed: the others keep their weights and meet it anew.
The ranks end with it, even if it is killed.
"""
