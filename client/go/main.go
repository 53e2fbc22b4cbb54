// Streams a model's answer to one prompt.
//
//	./generate.sh && go mod tidy      # once: the stubs, into pagewirev1/, and go.sum
//	go run . -address 127.0.0.1:7600 "Once upon a time"
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "pagewire/client/pagewirev1"
)

func main() {
	address := flag.String("address", "127.0.0.1:7600", "of a frontend")
	maxTokens := flag.Uint("max-tokens", 128, "most tokens of the answer")
	temperature := flag.Float64("temperature", 1, "0 takes the most probable token")
	timeout := flag.Duration("timeout", time.Minute, "until the request is given up")
	flag.Parse()

	request := &pb.GenerateRequest{
		Prompt: &pb.GenerateRequest_Text{Text: strings.Join(flag.Args(), " ")},
		SamplingParams: &pb.SamplingParams{
			MaxTokens:   proto.Uint32(uint32(*maxTokens)),
			Temperature: proto.Float32(float32(*temperature)),
		},
	}
	if err := stream(*address, *timeout, request, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "error:", status.Convert(err).Message())
		os.Exit(1)
	}
}

// stream writes the text of an answer as it comes. An answer is whole only once its usage has come.
func stream(address string, timeout time.Duration, request *pb.GenerateRequest, out io.Writer) error {
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer connection.Close()
	// The deadline travels with the call: the scheduler does not begin what cannot meet it.
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	responses, err := pb.NewInferenceServiceClient(connection).Generate(ctx, request)
	if err != nil {
		return err
	}
	for isComplete := false; ; {
		response, err := responses.Recv()
		if err == io.EOF && isComplete {
			_, err = fmt.Fprintln(out)
			return err
		}
		if err == io.EOF {
			return errors.New("the stream ended before the answer was complete")
		}
		if err != nil {
			return err
		}
		for _, choice := range response.Choices {
			fmt.Fprint(out, choice.Text)
		}
		isComplete = response.Usage != nil
	}
}
