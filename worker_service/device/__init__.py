"""Steps on a device that computes beside the host.

| file | holds |
| --- | --- |
| `runner.py` | `DeviceRunner`: a plan in, a launched step out; what a launch has to wait for |
| `launch.py` | the work of one step: eager or replayed, then sampled |
| `flight.py` | a launched step until host and core have its tokens |
| `slots.py`, `state.py` | what the device knows of the sequences, by slot |
| `penalties.py` | counts of tokens for those that have penalties |
| `staging.py` | one copy of numbers to the device |
| `sampler.py` | the sampler whose tokens stay on the device |
| `graphs.py` | decode steps recorded once and replayed, by padded batch size |
| `marks.py` | points in the device's work, to wait for and to time |

All of it runs on a CPU too, where the device is done as soon as it is told: tests prove there that
launching ahead, padding and replaying change no token.
"""
