package main

import "slices"

// figures are measured in this order.
var figures = slices.Concat(
	chargeFigures, batchFigures, windowFigures, commandFigures, pieceFigures, holdFigures, seatFigures, // with goals
	costFigures, trendFigures, peerFigures(),
)
