"""Your project: the LightningModules, the networks in models/, the data sets in
data/."""
