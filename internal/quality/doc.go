// Package quality measures what a model predicts, in numbers that two artifacts, formats or machines can be compared by: perplexity over
// texts, and the changes in a greedy continuation when another artifact or another storage format scores it.
//
// Everything is computed from logits of passes that start from an empty sequence. Probabilities are over the tokenizer's ids, natural
// logarithms, summed in float64.
package quality
