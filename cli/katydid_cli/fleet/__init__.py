"""`katydid up`: the whole suite on one machine, as child processes of one terminal."""
