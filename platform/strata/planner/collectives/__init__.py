"""Cost model of collectives by algorithm, protocol and topology, and a lab that measures them."""
