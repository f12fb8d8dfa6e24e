"""Where each expert is: slots, policies, readers, packed files, and what runs a program whose experts are streamed."""
