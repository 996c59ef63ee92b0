"""One model over several processes: the first steps, the others follow it word by word (tensor parallel)."""
