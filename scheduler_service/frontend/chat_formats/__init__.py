"""Chat formats: thoughts and tool calls in a model's output, found while it is streamed.

Every family of models marks the parts of its answers in its own way; the ways are data, and one
parser reads them all. It gets the text piece by piece and returns parts: content, reasoning, the
start of a call, pieces of its arguments. The parts say the same for every way in which the text is
cut into pieces. Text is held back only as long as it may turn out to be a mark or to belong to a
call; what looks like a call and is none is content, and nothing is dropped but marks, white space
beside them, and members of a call's object that are no part of the call.

- `formats`: the table of formats, and which one a model uses.
- `syntax`: what a format consists of.
- `events`: the parts of a message, which a parser returns.
- `parser`: text, thoughts, and sections of calls.
- `calls`: one call: a JSON object, or a name and then its arguments.
- `values`: arguments, as JSON, Python or Gemma write them, to JSON.
- `schemas`: the types of arguments that are written without quotes.
- `source`: the text that comes in pieces, and marks in it.
"""
