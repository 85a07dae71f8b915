"""The five stages of a runner as a picture, with the keys that flow between them.

``edges`` says what the picture shows; ``text`` and ``mermaid`` draw it. Nothing is imported but source is read.
"""
