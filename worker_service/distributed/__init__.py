"""The ranks that hold one copy of a model together.

    layout.py         which part of a model a rank holds, as plain numbers
    communicator.py   the rendezvous of an epoch, its collectives, and the communicator that a
                      model's layers use

The core sends every plan to every rank, and each rank keeps the same state of the sequences, so
ranks exchange only hidden states, partial sums, logits, sampled tokens and drafts
(`runner/batch/micro_batches.py`, `runner/state/sequence_state.py`).

Promises. One rank samples, so tokens cannot differ between ranks. On CPUs a row's numbers do not
depend on the rest of the batch, as with one rank; they differ in the last bits between groups of
different tensor_parallel_size, because sums are taken in another order. A rank that loses another
ends its step stream with ABORTED and keeps its weights; the next epoch joins it to the ranks
that are present then.
"""
