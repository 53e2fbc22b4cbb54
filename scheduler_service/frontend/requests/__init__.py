"""Open requests: what is sent to a core again if one is lost, and what readers have yet to take.

| module | holds |
| --- | --- |
| `request_stream` | one open request, from its arrival to its last response |
| `submission` | what cores have of it, and have reported |
| `output_assembler` | the outputs of its choices, merged until they are read |
| `choice_stream` | tokens, text and end of one choice |
| `pooled_text` | a text that gets a vector, for the core a request without choices |
| `request_span` | its span in a trace |
"""
