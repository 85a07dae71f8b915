"""The command ``pipeline convert``: a PaddleRec 1.8.5 config becomes one of ours."""
