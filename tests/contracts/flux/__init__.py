"""What the change `flux` must do on any management cluster; the tests play Flux's controllers."""
