"""Several ranks that hold one copy of a model together.

    layout.py         which part of a model a rank holds, as plain numbers
    layers.py         layers that the ranks of a stage share
    ranks.py          a rank's line to the others, as layers use it
    rendezvous.py     where the ranks find each other, anew for every epoch
    lines.py          collectives of one epoch, over torch.distributed
    runner.py         a rank's part of a step
    micro_batches.py  a step's rows in parts, so that stages work at the same time
    agreement.py      all ranks know the tokens that one of them sampled

The core sends every plan to every rank, and each keeps the same state of the sequences, so that
ranks exchange nothing but hidden states, partial sums, logits and sampled tokens.

Promises. One rank samples, so tokens cannot differ between ranks. On CPUs a row's numbers do not
depend on the rest of the batch, as with one rank; but they differ in the last bits between groups
of different tensor_parallel_size, because sums are taken in another order. A rank that loses
another ends its step stream with ABORTED and keeps its weights; the next epoch joins it to those
that are there then.
"""
