"""A PaddleRec 1.8.5 config -> one of ours, by edits of its text: comments, order and spelling stay as they are."""
